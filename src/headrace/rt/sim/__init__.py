"""Backend `sim`: a seeded simulated device on the CPU that reports every race."""
