from .amount import BudgetedCompression as BudgetedCompression
from .amount import compress_under_budget as compress_under_budget
from .compress import Compressed as Compressed
from .report import CompressionReport as CompressionReport
