from .decoder import Decoder as Decoder
