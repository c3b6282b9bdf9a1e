"""The serving loop over pure jitted steps: greedy, mixed adapters, a fixed number of rows."""

from lorajax.engine.admission import Admission as Admission
from lorajax.engine.admission import Waiting as Waiting
from lorajax.engine.admission import admit as admit
from lorajax.engine.compiles import CompileCounter as CompileCounter
from lorajax.engine.engine import Engine as Engine
from lorajax.engine.engine import EngineStats as EngineStats
from lorajax.engine.request import Limits as Limits
from lorajax.engine.request import Request as Request
from lorajax.engine.request import RequestError as RequestError
from lorajax.engine.request import Result as Result
from lorajax.engine.steps import Choice as Choice
from lorajax.engine.steps import Steps as Steps
from lorajax.engine.stop import eos_token_ids as eos_token_ids
