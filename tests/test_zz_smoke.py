import time
from service_stack import *
def chain(c):
    while c is not None:
        f=getattr(c,'cr_frame',None) or getattr(c,'ag_frame',None) or getattr(c,'gi_frame',None)
        print(' ', type(c).__name__, f and (f.f_code.co_qualname, f.f_code.co_filename[-30:], f.f_lineno))
        if f and '__aexit__' in f.f_code.co_name and 'self' in f.f_locals and hasattr(f.f_locals['self'],'gen'):
            g=f.f_locals['self'].gen; print('   gen', g.ag_frame and (g.ag_frame.f_code.co_qualname,g.ag_frame.f_lineno)); chain(g.ag_await)
        c=getattr(c,'cr_await',None) or getattr(c,'ag_await',None) or getattr(c,'gi_yieldfrom',None)
async def test_x(brokers, tmp_path):
    s=None
    cm=service_stack(brokers.nats_url, brokers.redis_url, tmp_path)
    s=await cm.__aenter__()
    print((await s.ask("hi", picture())).text)
    async def show(t):
      await asyncio.sleep(2)
      if not t.done():
        chain(t.get_coro())
    for n,p in [("gw",s.gateway),("pd",s.pds[0].process),("enc",s.encoders[0].process)]:
        t=time.monotonic()
        w=asyncio.create_task(show(p.task))
        await p.stop()
        w.cancel()
        print(n, time.monotonic()-t)
    t=time.monotonic()
    await cm.__aexit__(None,None,None)
    print("down", time.monotonic()-t)
