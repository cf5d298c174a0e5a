"""The device's side of a step: buffers, batch, forward, sampler.

The only owner of device memory.
"""
