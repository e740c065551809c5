from .perplexity import Perplexity as Perplexity
from .speed import Speed as Speed
from .tasks import TaskScores as TaskScores
from .tasks import load_tasks as load_tasks
