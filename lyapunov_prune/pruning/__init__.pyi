from .gate import GateReport as GateReport
from .mergekit import MergekitSlices as MergekitSlices
