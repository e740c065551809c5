from .perplexity import Perplexity as Perplexity
from .score import ItemScores as ItemScores
from .score import paired_error as paired_error
from .score import score as score
from .speed import Speed as Speed
from .task_scores import TaskScores as TaskScores
from .tasks import load_tasks as load_tasks
