"""The one TPU kernel behind the three ops: its problem, tiles, body and traffic."""
