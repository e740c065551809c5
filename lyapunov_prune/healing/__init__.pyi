from .heal import Healed as Healed
from .heal import Healing as Healing
