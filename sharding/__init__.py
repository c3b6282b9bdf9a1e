"""The only place that says mesh, PartitionSpec and shard_map."""

from lorajax.sharding.ops import ShardedOps as ShardedOps
from lorajax.sharding.ops import sharded as sharded
from lorajax.sharding.partition import Partition as Partition
from lorajax.sharding.processes import ProcessError as ProcessError
from lorajax.sharding.processes import agree as agree
from lorajax.sharding.processes import connect as connect
from lorajax.sharding.processes import together as together
from lorajax.sharding.rules import AxisRules as AxisRules
from lorajax.sharding.shard import Shard as Shard
from lorajax.sharding.state import abstract_slots as abstract_slots
from lorajax.sharding.state import state_shardings as state_shardings
