from .cost import TensorCost as TensorCost
from .cost import costs as costs
from .spend import spend as spend
from .spent import Spent as Spent
