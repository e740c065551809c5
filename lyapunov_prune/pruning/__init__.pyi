from .gate import GateReport as GateReport
from .removed import ChannelsGone as ChannelsGone
from .removed import ExpertsGone as ExpertsGone
from .removed import LayersGone as LayersGone
from .removed import PartsGone as PartsGone
from .width import choose_channels as choose_channels
