from .compress import Compressed as Compressed
from .report import CompressionReport as CompressionReport
