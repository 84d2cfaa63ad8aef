# options: --scenario one_slot --preemptions 2 --deaths 0 --delays 1
# Who rings looks at the flag first, while what it has changed may still be on its way.
/^void bell_ring_for(/,/^}/s/bell_fence(&self->wanted);/;/
