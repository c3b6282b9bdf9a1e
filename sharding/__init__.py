"""The only place that says mesh, PartitionSpec and shard_map."""

from lorajax.sharding.rules import AxisRules as AxisRules
from lorajax.sharding.state import state_shardings as state_shardings
