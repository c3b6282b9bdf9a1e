"""lorajax: multi-LoRA serving core for JAX. Any mix of adapters in one compiled step."""

from lorajax.adapter import Adapter as Adapter
from lorajax.adapters import load_adapter as load_adapter
from lorajax.adapters import save_adapter as save_adapter
from lorajax.apply import add_lora as add_lora
from lorajax.apply import lora_delta as lora_delta
from lorajax.apply import lora_embed as lora_embed
from lorajax.apply import lora_linear as lora_linear
from lorajax.errors import AdapterError as AdapterError
from lorajax.errors import ImplementationError as ImplementationError
from lorajax.errors import LoraError as LoraError
from lorajax.errors import ModelError as ModelError
from lorajax.errors import PoolFullError as PoolFullError
from lorajax.errors import SpecError as SpecError
from lorajax.errors import UnknownAdapterError as UnknownAdapterError
from lorajax.kernels_pallas import Routing as Routing
from lorajax.kernels_pallas import make_routing as make_routing
from lorajax.merge import merge_adapter as merge_adapter
from lorajax.runtime import AdapterManager as AdapterManager
from lorajax.runtime import Lease as Lease
from lorajax.runtime import infer_spec as infer_spec
from lorajax.spec import LoraSpec as LoraSpec
from lorajax.state import LoraState as LoraState
from lorajax.state import clear_slots as clear_slots
from lorajax.state import init_state as init_state
from lorajax.state import write_slots as write_slots
from lorajax.target import Target as Target
