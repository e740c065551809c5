from .compress import Compressed as Compressed
from .on_disk import compress_on_disk as compress_on_disk
from .report import CompressionReport as CompressionReport
