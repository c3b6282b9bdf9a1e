"""The only place that says mesh, PartitionSpec and shard_map."""
