from .heal import Healed as Healed
from .heal import Healing as Healing
from .own_text import self_generated as self_generated
