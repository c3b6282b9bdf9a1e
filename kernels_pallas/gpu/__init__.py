"""The fused Hopper kernel behind the three ops: plan, schedule, stages, launch."""
