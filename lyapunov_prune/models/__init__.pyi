from .adapters import merge_adapters as merge_adapters
from .decoder import Decoder as Decoder
from .loading import LoadedClassifier as LoadedClassifier
from .loading import load_classifier as load_classifier
