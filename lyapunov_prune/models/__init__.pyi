from .loading import Loaded as Loaded
