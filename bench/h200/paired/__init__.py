"""Our layer and other engines timed in pairs: one process, random order, hot and cool."""
