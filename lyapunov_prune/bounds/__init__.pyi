from .approximate import approximate as approximate
from .check import check_grid as check_grid
from .report import BoundsReport as BoundsReport
