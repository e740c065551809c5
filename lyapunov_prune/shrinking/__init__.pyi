from .cost import Estimate as Estimate
from .report import Shrinking as Shrinking
from .report import Shrunk as Shrunk
from .report import Taken as Taken
from .target import Target as Target
