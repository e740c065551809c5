from .approximate import approximate as approximate
from .check import check_grid as check_grid
from .check import check_written as check_written
from .report import BoundsReport as BoundsReport
