from .decision import JointDecision as JointDecision
from .decision import decide as decide
from .decision import noisy_choices as noisy_choices
from .map import JointMap as JointMap
from .map import fit_map as fit_map
