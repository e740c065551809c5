from .compact import Cuts as Cuts
from .compact import make_compact as make_compact
from .compact_gate import verify_compact as verify_compact
from .pruned import write_pruned as write_pruned
from .streamed import compress_on_disk as compress_on_disk
