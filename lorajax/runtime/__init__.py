"""The host runtime: which adapters are in the slots, and who may use them."""

from lorajax.runtime.infer import infer_spec as infer_spec
from lorajax.runtime.lease import Lease as Lease
from lorajax.runtime.ledger import Stats as Stats
from lorajax.runtime.manager import AdapterManager as AdapterManager
from lorajax.runtime.policy import EvictionPolicy as EvictionPolicy
from lorajax.runtime.policy import fifo as fifo
from lorajax.runtime.policy import lru as lru
from lorajax.runtime.pool import Resident as Resident
from lorajax.runtime.pool import Version as Version
from lorajax.runtime.rows import CacheKey as CacheKey
