from .gate import GateReport as GateReport
from .mergekit import MergekitSlices as MergekitSlices
from .width import choose_channels as choose_channels
