from .adapters import merge_adapters as merge_adapters
from .decoder import Decoder as Decoder
