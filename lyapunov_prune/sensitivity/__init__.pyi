from .sensitivity import Sensitivity as Sensitivity
