from .report import Healed as Healed
from .report import Healing as Healing
