from .adapters import merge_adapters as merge_adapters
from .classifier_loading import LoadedClassifier as LoadedClassifier
from .classifier_loading import load_classifier as load_classifier
from .decoder import Decoder as Decoder
