"""Plans for GPUs, of a device that is here or as it is described, and their replay."""
