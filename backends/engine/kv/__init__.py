"""Where keys and values live: one file per layout, behind one interface (`backends/engine/kv/base.py`)."""
