from .compress import Compressed as Compressed
from .compress import CompressionReport as CompressionReport
