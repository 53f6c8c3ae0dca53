"""The ground floor: arguments, files on disk, threads, the JIT and its cache. Nothing here knows of matrices."""
