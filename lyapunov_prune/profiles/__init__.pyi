from .contraction_profile import ContractionProfile as ContractionProfile
from .expert_use import ExpertUse as ExpertUse
from .expert_use import expert_use as expert_use
from .influence import InfluenceProfile as InfluenceProfile
from .influence import SublayerInfluence as SublayerInfluence
from .influence import sublayer_influence as sublayer_influence
from .profile import LayerProfile as LayerProfile
from .profile import profile_layers as profile_layers
