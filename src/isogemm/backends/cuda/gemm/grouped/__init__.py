"""Products of groups of rows whose lengths the device alone knows."""
