"""Memory, step time and the layout to take, estimated from a trace of the step without devices."""
