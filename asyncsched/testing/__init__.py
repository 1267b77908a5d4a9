"""Instruments for tests of engines and policies. No pytest inside."""

from .byte_tokenizer import ByteTokenizer as ByteTokenizer
from .conformance import ConformanceError as ConformanceError
from .conformance import ConformanceReport as ConformanceReport
from .conformance import check_policy as check_policy
from .fake_views import FakePrefix as FakePrefix
from .fake_views import FakeRequest as FakeRequest
from .fake_views import FakeView as FakeView
from .invariants import InvariantError as InvariantError
from .invariants import check_invariants as check_invariants
from .oracle import expected_tokens as expected_tokens
from .scripted import ScriptedRun as ScriptedRun
from .simulated_device import SimulatedDevice as SimulatedDevice
from .simulated_device import SimulationError as SimulationError
from .simulated_executor import InstantExecutor as InstantExecutor
from .simulated_executor import SimulatedExecutor as SimulatedExecutor
from .threaded_executor import DeviceTimeline as DeviceTimeline
from .threaded_executor import ThreadedExecutor as ThreadedExecutor
