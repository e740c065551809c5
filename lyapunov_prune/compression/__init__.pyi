from .amount import BudgetedCompression as BudgetedCompression
from .amount import compress_under_budget as compress_under_budget
from .compress import Compressed as Compressed
from .on_disk import compress_on_disk as compress_on_disk
from .report import CompressionReport as CompressionReport
