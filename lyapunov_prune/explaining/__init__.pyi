from .explanation import Explanation as Explanation
