from .amplification import AmplificationDrift as AmplificationDrift
from .amplification import amplification_drift as amplification_drift
from .sensitivity import Sensitivity as Sensitivity
