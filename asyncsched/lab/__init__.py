"""The laboratory: the real engine in virtual time, on traces of real traffic, to compare policies.

Nothing of the scheduler is implemented again here: only time, the device and the callers are simulated.
"""

from .simulator import Setup as Setup
from .simulator import SimulationResult as SimulationResult
from .simulator import simulate as simulate
from .trace import Trace as Trace
from .trace import TraceRequest as TraceRequest
