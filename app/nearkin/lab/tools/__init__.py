"""Programs that `nearkin bench` measures, each behind one interface."""
