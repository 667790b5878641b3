-- Asks kvroute where a request goes, and reports its first byte and its end; for nginx with its Lua
-- module, and for OpenResty. nginx-lua.conf beside it says where this is called.

local kvroute = {router = "127.0.0.1:8080"}

local function tell(_, method, path, key, body)
  local socket, host, port = ngx.socket.tcp(), kvroute.router:match("^(.+):(%d+)$")
  socket:settimeout(5000)
  if not socket:connect(host, tonumber(port)) then return end
  socket:send({method, " ", path, " HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n",
    key and "authorization: " .. key .. "\r\n" or "",
    "content-type: application/json\r\ncontent-length: ", #body, "\r\n\r\n", body})
  socket:receive("*a")
end

function kvroute.ask()
  ngx.req.read_body()
  local answer = ngx.location.capture("/kvroute/select_and_reserve",
    {method = ngx.HTTP_POST, body = ngx.req.get_body_data() or "{}"})
  if answer.status ~= 200 then
    ngx.status, ngx.header["content-type"] = answer.status, "application/json"
    ngx.header["retry-after"] = answer.header["retry-after"]
    ngx.print(answer.body)
    return ngx.exit(answer.status)
  end
  ngx.var.kvroute_address = answer.body:match('"address":"([^"]+)"')
  ngx.var.kvroute_rank = answer.body:match('"x%-data%-parallel%-rank":"(%d+)"') or ""
  ngx.ctx.path = "/reservations/" .. answer.body:match('"selection_id":"([^"]+)"')
  ngx.ctx.key = ngx.var.http_authorization
end

function kvroute.read()
  local context = ngx.ctx
  if not context.path then return end
  if not context.tail then
    ngx.timer.at(0, tell, "POST", context.path .. "/prefill_complete", context.key, "")
  end
  context.tail = ((context.tail or "") .. ngx.arg[1]):sub(-4096)  -- the usage stands near the end
  context.is_whole = ngx.arg[2]
end

function kvroute.report()
  local context = ngx.ctx
  if not context.path then return end
  local usage = context.tail and context.tail:match('"usage":%s*(%b{})')
  local report = {
    '{"outcome":"', context.is_whole and "completed" or "client_left",
    '","status":', ngx.status, usage and ',"usage":' .. usage or "", "}",
  }
  ngx.timer.at(0, tell, "DELETE", context.path, context.key, table.concat(report))
end

return kvroute
