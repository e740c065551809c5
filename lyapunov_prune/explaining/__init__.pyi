from .explanation import Explanation as Explanation
from .kv_cache import with_rounded_cache as with_rounded_cache
