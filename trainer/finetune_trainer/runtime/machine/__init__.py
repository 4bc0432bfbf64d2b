"""The machine below a stage: processors, memory, disk, GPU, and notices of its end."""
