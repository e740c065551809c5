from .allocation import Allocation as Allocation
