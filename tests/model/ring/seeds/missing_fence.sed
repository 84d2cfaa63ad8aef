# options: --scenario put --weak --preemptions 3 --deaths 0
# A producer looks at the bell while its commit still waits in the store buffer.
/^[a-z].*doorbell_ring(/,/^}/s/bell_fence(&header->bell);/;/
