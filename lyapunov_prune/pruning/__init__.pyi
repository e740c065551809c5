from .gate import GateReport as GateReport
