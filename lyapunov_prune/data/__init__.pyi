from .choices import ChoiceItem as ChoiceItem
from .choices import load_items as load_items
from .examples import slices as slices
from .images import ImageBatch as ImageBatch
