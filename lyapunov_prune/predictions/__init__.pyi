from .attention_paths import AttentionPaths as AttentionPaths
from .attention_paths import attention_paths as attention_paths
from .choices import ChoiceComparison as ChoiceComparison
from .choices import compare_choices as compare_choices
from .divergence import SkipDivergence as SkipDivergence
from .divergence import skip_divergence as skip_divergence
from .generation import GenerationDivergence as GenerationDivergence
from .hierarchy import HierarchyProbe as HierarchyProbe
